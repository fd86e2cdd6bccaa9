"""Ray: the controller and worker actors, placement, watching, and performing what control decided.

Nothing here chooses. A command is performed, and whatever comes of it is posted as an event.
"""
