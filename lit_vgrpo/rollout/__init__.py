"""The images of one iteration: sampled, scored and compared."""
