"""Helpers for every layer of the package; none of them is about training.

- `arguments`: functions whose arguments are the fields of a dataclass
- `check`: checks of callers' arguments
- `combinations`: features that do not go together, with the reason
- `notices`: the checks for training that goes wrong but does not stop
- `trees`: functions on trees that `optax.tree` lacks
- `description`: the leaves of a tree, as data that can be compared and stored
- `layout`: offsets of leaves in one flat buffer
- `find_object`: find an object by its name, "module:object"
- `extras`: a check that the packages of an extra are installed
- `attempt`: run an optional step, and skip it when it raises
- `retry`: repeat a call that may succeed later; `Outage`: its failed attempts
- `in_background`: run a function on a daemon thread
- `keep_running`: run a loop on a daemon thread, and restart it when it raises
- `write_whole`: write a file atomically
"""

from agn_optax._internal import arguments as arguments
from agn_optax._internal import check as check
from agn_optax._internal import combinations as combinations
from agn_optax._internal import description as description
from agn_optax._internal import extras as extras
from agn_optax._internal import layout as layout
from agn_optax._internal import notices as notices
from agn_optax._internal import trees as trees
from agn_optax._internal.attempts import attempt as attempt
from agn_optax._internal.background import in_background as in_background
from agn_optax._internal.background import keep_running as keep_running
from agn_optax._internal.description import Description as Description
from agn_optax._internal.description import Leaf as Leaf
from agn_optax._internal.files import write_whole as write_whole
from agn_optax._internal.notices import Notice as Notice
from agn_optax._internal.notices import Notices as Notices
from agn_optax._internal.notices import Thresholds as Thresholds
from agn_optax._internal.objects import find_object as find_object
from agn_optax._internal.retries import Outage as Outage
from agn_optax._internal.retries import retry as retry
