"""How does user code travel to a Ray worker, with a key that knows what it reaches?"""
