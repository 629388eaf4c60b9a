"""cohere: documents by their rank."""

import cohere
from asked import EMBEDDER, EMBEDDER_URL, TEXTS, Row, expect

row = Row("cohere (Python)")
with row.shows("rerank"):
    client = cohere.ClientV2(api_key="none", base_url=EMBEDDER_URL)
    answer = client.rerank(model=EMBEDDER, query=TEXTS[1], documents=TEXTS, top_n=2)
    expect("nearest document", answer.results[0].index, 1)
    expect("number of documents", len(answer.results), 2)
