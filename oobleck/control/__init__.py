"""Control: membership, recovery, the coordinator, its protocol and its journal.

Pure: it uses the standard library, and the planner's and the job's values. Time is an argument, `now_s`. Import from
the rooms: an agent needs the protocol without the coordinator, and so starts faster.
"""
