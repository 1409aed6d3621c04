"""Checks for a machine with a GPU: is state on the device captured and restored exactly, and at what cost?"""
