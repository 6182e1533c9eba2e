"""InfoFlow KV's experiments, on our models: which tokens the question chooses, of chunks that were prefilled alone.

`plan` has sizes and arms, `contexts` draws texts with their passages, `splits` cuts contexts and images into chunks,
`text_arms` and `image_arms` measure, `suite` makes parts and rows, `document` writes the page.
"""
