"""What a recipe exchanges and how long an iteration takes on many GPUs, by arithmetic."""
