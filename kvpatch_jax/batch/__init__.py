"""Many questions over shared images and texts, answered in batches and written as lines of JSON."""

from .answer_batch import BatchConfig as BatchConfig
from .answer_batch import BatchReport as BatchReport
from .answer_batch import answer_batch as answer_batch
from .batch_file import read_answers as read_answers
from .batch_items import BatchItem as BatchItem
