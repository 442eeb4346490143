"""Which GPU does what: the GPUs of this machine and the run file in, the devices of each process out; imports services' settings."""
