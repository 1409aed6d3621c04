"""What Prometheus was told while faults were done to real jobs, and the script that recorded it."""
