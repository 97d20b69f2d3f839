"""What becomes of what the self-check and the comparison find: a warning on rank 0, or an error on all ranks"""
import warnings

from ..core.env import group_rank

# ---
class Findings:
    "Call it with what was found, on all ranks alike. Each code has an entry in docs/messages.md"
    def __init__(self,
        mode='warn' # 'warn'; 'error': raise on all ranks; False: leave findings out, and do not look for them
    ):
        if mode not in ('warn','error') and mode is not False: raise ValueError(f"checks={mode!r}: give 'warn', "
                                                                                "'error' or False")
        self.mode,self.told = mode,set()

    def __call__(self,
        code:str, # Its name in docs/messages.md
        text:str,
        once=None # What is reported a single time; None: report it each time
    ):
        "Warn on rank 0, or raise ValueError on all ranks"
        if not self.mode or once is not None and (code,once) in self.told: return
        self.told.add((code,once))
        if self.mode=='error': raise ValueError(f'[{code}] {text}')
        if not group_rank(): warnings.warn(f'[{code}] {text}')

    def note(self, code, text):
        "Warn on rank 0 of a setting that was chosen for the user, which is no error"
        if self.mode and not group_rank(): warnings.warn(f'[{code}] {text}')
