"""LoRA of a Hugging Face model, sharded over as many processes as the launcher starts (pip install 'learnerdist[hf]'):

    python -m learnerdist.launch --nproc 2 examples/lora.py

A randomly initialised Llama, so that nothing is downloaded; `from_pretrained` works in `build`, too. The same run on one process, at the
same global batch size: `python examples/lora.py --bs 8`"""
# ruff: noqa: F403,F405
import argparse

import torch
from learnerdist.all import *
from torch.utils.data import DataLoader,Dataset

def build():
    from peft import LoraConfig,get_peft_model
    from transformers import LlamaConfig,LlamaForCausalLM
    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
    model = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=64, use_cache=False))
    return get_peft_model(model, LoraConfig(r=8, target_modules=['q_proj','v_proj'], task_type='CAUSAL_LM'))

class Prompts(Dataset):
    "A prompt, which the loss leaves out (labels of -100), and its answer: the prompt again. Batches are dicts, as Hugging Face's are"
    def __init__(self, n, seed): self.tokens = torch.randint(64, (n,8), generator=torch.Generator().manual_seed(seed))
    def __len__(self): return len(self.tokens)
    def __getitem__(self, i):
        ids = self.tokens[i].repeat(2)
        labels = ids.clone()
        labels[:8+i%3] = -100
        return dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels)

def main():
    p = argparse.ArgumentParser(description='LoRA of a small Llama')
    p.add_argument('--epochs', type=int, default=3)
    p.add_argument('--bs', type=int, default=4, help='batch size of each process')
    args = p.parse_args()
    torch.manual_seed(42)
    dls = DataLoaders(DataLoader(Prompts(64, 0), args.bs, shuffle=True), DataLoader(Prompts(20, 1), args.bs))
    dls.device = torch.device('cpu')
    learn = Learner(dls, build(), lr=1e-2) # no loss function: the model's own loss
    with learn.distrib_ctx(seed=1, shard=True): # its decoder layers are found
        learn.fit(args.epochs)
        learn.save('lora')
    if is_rank0(): print(sum(p.numel() for p in learn.model.parameters() if p.requires_grad), 'weights trained')

if __name__=='__main__': main()
