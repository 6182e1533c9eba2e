"""A backbone whose images and pages are reused between requests, in the shapes that other harnesses call.

`ReusedChat` answers messages; `lmms` is it as lmms-eval's model class.
"""

from .reused_chat import ReusedAnswer as ReusedAnswer
from .reused_chat import ReusedChat as ReusedChat
