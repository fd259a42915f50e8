"""What is done with a registered model from the command line?"""
