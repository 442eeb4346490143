"""The commands of ``python -m penstock.trainer``, one file each; may import every package of the trainer."""
