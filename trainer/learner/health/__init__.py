"""What a step says of the training's health: gradients and updates by layer, outliers, and computation.

Imports the settings, errors and the model's shapes; not the policy, which measures with it.
"""
