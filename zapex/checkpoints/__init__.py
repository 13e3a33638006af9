"""What a run resumes from: files, the learner's state, the saved policy.

Imports: agent, config, envs, errors, machine.
"""
