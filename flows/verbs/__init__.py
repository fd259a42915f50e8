"""What does each verb of the command do? One file for each; `doctor` looks at several things and is a folder."""
