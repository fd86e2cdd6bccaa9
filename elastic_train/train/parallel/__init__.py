"""How a model is divided over the axes of a plan, and how gradients are summed over them."""
