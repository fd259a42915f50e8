"""How fast do a pipeline's rows reach its workers, where does the time go, and which lines of the file make it faster?

Words: a *knob* is a line of the file that reading depends on; a *reading* is one pass of the workers without a model.
Public: `probe`, `measure`, `knobs`, `plot`.
"""
