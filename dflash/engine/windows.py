from dflash.model.cache_dflash import PreallocatedCache
from dflash.model.drafting_dflash import DrafterContext
class WindowedCache(PreallocatedCache): pass
class WindowedContext(DrafterContext): pass
