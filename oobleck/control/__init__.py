"""Control: membership, recovery, the coordinator, its protocol and its journal.

Pure: the standard library, the planner's and the job's values. Time comes in as `now_s`. Import from the modules:
an agent needs the protocol and not the machine, and starts faster without it.
"""
