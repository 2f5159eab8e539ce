from dflash.model.acceptance_dflash import Proposals, Acceptance, Acceptor
from dflash.model.cache_dflash import PreallocatedCache
class TreeProposals(Proposals): pass
class TreeAcceptance(Acceptance): pass
class TreeAcceptor(Acceptor): pass
class TreeCache(PreallocatedCache): pass
class TreeProposer:
    def __init__(self,*a): raise NotImplementedError
    def propose(self): ...
def verify_tree(*a): raise NotImplementedError
