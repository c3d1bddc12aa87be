"""Does an inference engine accept as many drafts as our evaluator says it will? vLLM is the judge."""
