"""What operators and their tools see of an SMP: status, metrics, the page."""
