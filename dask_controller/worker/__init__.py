"""Ranks: the base class of user code, and what runs it on a host.

Owns what a rank knows of itself (:mod:`.context`), the base class (:mod:`.base`), how one call is carried out
(:mod:`.runner`), where it is carried out (:mod:`.executor`), and the actor that ties a rank to its host
(:mod:`.host`). Does not own where ranks are placed (``pool/``) or who calls them (``group/``).
"""
