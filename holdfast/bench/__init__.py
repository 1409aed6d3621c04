"""What `holdfast bench` measures."""
