"""Training on N ranks against one process, cell by cell of a table.

``table`` lists the cells, ``models`` holds what is trained, ``reference`` trains it in plain torch in one process, and
``parallel`` trains it through the package. Nothing of the package, or of Lightning, is in the first three.
"""
