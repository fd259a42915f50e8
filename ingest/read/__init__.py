"""What exactly was read, and to which split does each row belong?

Words: a *snapshot* is the committed list of files, their rows and the one schema for all; a *split* is train, validation or
test; a row's *identity* is a hash of its content. Public: `snapshot`, `splits`.
"""
