"""Recipes that run one after the other, each from the weights of the previous one."""
