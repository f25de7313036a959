"""How the arguments of a call go to the ranks and how their results come back.

Pure functions and two tables; no cluster is needed to import or test them. :mod:`.modes` names the modes,
:mod:`.register` marks methods, :mod:`.functions` and :mod:`.mesh` split and join, :mod:`.registry` says which mode uses
which functions. Public names are imported from ``dask_controller``: this package repeats none of them, since the
function ``register`` would hide the module of the same name.
"""
