"""How fast do a pipeline's rows reach its workers, where does the time go, and which lines of the file make it faster?"""
