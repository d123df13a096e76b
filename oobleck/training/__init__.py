"""Training: models, data, the execution of schedules, collectives. No package below this one imports torch.

It knows plans, schedules and messages, and nothing of SSH, trio or the making of decisions.
"""
