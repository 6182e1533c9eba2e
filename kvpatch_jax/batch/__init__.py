"""Many questions over shared images and texts, answered in sessions and written as lines of JSON."""

from .answer_batch import BatchReport as BatchReport
from .answer_batch import answer_batch as answer_batch
from .answer_file import read_answers as read_answers
from .items import BatchItem as BatchItem
from .on_ray import once_in_this_process as once_in_this_process
from .on_ray import run_shards as run_shards
