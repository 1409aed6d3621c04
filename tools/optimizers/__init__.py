"""``make optimizers``: every optimizer class of other packages is killed, restored and compared to the last bit."""
