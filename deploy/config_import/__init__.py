"""`penstock config import`: a configuration of another system becomes a run file, with a report; nothing in it is executed."""
