"""Small jobs to read. Each shows one way to train and how to protect it."""
