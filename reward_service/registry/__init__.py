"""From a reward's name to what scores it: built-in, composed in the run file, or an endpoint."""
