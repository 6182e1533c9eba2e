"""A backbone whose images and pages are reused between requests, in the shapes that other harnesses call.

`ReusedChat` answers messages; `generate` is it with transformers' two objects, `lmms` with lmms-eval's model class.
"""

from .generate import ReusedModel as ReusedModel
from .generate import ReusedProcessor as ReusedProcessor
from .reused_chat import ReusedAnswer as ReusedAnswer
from .reused_chat import ReusedChat as ReusedChat
