"""Training: models, data, the execution of schedules, collectives. Torch lives here alone.

It knows plans, schedules and messages; it knows nothing of SSH, trio or how decisions are made.
"""
