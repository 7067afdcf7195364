"""Scheduled programs as libtpu writes them, from the contents of their bundles."""


def program(*lines):
    """Bundles from their contents, numbered from 0."""
    return "\n".join(f"  {number:#x}   :  {{ {line} }}" for number, line in enumerate(lines)).replace("0x0 ", "  0 ")


def dma(granules, flag="[#allocation4]", kind="hbm_to_vmem", predicate=""):
    labels = f"/*hbm=*/%s1_s1, /*size_in_granules=*/{granules}, /*vmem=*/%s2_s2, /*dst_syncflagno=*/{flag}"
    return f"%859 = dma.{kind} [thread:$0]  {predicate}{labels}"


def wait(granules, flag="[#allocation4]"):
    return f"%1 = dma.done.wait {flag}, {granules}", f"%2 = vsyncadd {flag}, {2**32 - granules}"
