"""Trainers that outlive the death of another rank: a supervisor for each, and a rendezvous for all."""
