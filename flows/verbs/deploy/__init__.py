"""How does a pipeline get onto a schedule, and who is told when it fails there?"""
