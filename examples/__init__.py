"""Small jobs to read: each is one way to train, and how it is protected."""
