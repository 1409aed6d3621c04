"""Watches whether trainers are alive."""
