"""What language models are watched for besides their modules' outputs: attention logits, routers."""
