"""What stands next to training: each folder is complete with its command and can be deleted."""
