"""What services share to schedule work: admission, and what a step costs."""
