"""The guide says what `results.json` says."""

import json

import serving_guide


def test_the_tables_of_the_guide_are_those_of_the_results():
    text = serving_guide.GUIDE.read_text()
    for name, table in serving_guide.tables(json.loads(serving_guide.RESULTS.read_text())).items():
        begin, end = serving_guide.marked(name, text)
        assert text[begin:end].strip() == table, "run python tests/serving/serving_guide.py"
