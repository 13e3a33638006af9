"""What a run resumes from: files, the learner's state, the saved policy."""
