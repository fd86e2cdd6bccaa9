"""The worker actor: runs one member on a training thread and answers its controller."""
