"""Scheduled programs as libtpu writes them, from the contents of their bundles."""

import jaxops


def program(*lines):
    """Bundles from their contents, numbered from 0."""
    return "\n".join(f"  {number:#x}   :  {{ {line} }}" for number, line in enumerate(lines)).replace("0x0 ", "  0 ")


def dma(granules, flag="[#allocation4]", kind="hbm_to_vmem", predicate=""):
    source, destination = kind.split("_to_")
    to = f"{destination}_1" if source == destination else destination
    labels = f"/*{source}=*/%s1_s1, /*size_in_granules=*/{granules}, /*{to}=*/%s2_s2, /*dst_syncflagno=*/{flag}"
    return f"%859 = dma.{kind} [thread:$0]  {predicate}{labels}"


def wait(granules, flag="[#allocation4]"):
    return f"%1 = dma.done.wait {flag}, {granules}", f"%2 = vsyncadd {flag}, {2**32 - granules}"


# A top-level program that calls one fusion in a loop, while it copies; and the same fusion under another name, as an
# operator that the same line has called. Of frames, the compiler writes 1 for no parent, and 2 for the first.
HLO = f"""HloModule jit_call, is_scheduled=true

FileNames
1 "/home/user/model.py"
2 "{jaxops.__path__[0]}/softmax.py"

FunctionNames
1 "<module>"
2 "main.<locals>.loss"
3 "softmax"

FileLocations
1 {{file_name_id=1 function_name_id=2 line=12 end_line=12 column=8 end_column=48}}
2 {{file_name_id=2 function_name_id=3 line=67 end_line=67 column=8 end_column=48}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}
2 {{file_location_id=2 parent_frame_id=2}}
"""
HLO += """
%fused_computation (param_0: f32[8,128]) -> f32[8,128] {
  %param_0 = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %negate.1 = f32[8,128]{1,0:T(8,128)} negate(%param_0)
}

%fused_computation.1 (param_0.1: f32[8,128]) -> f32[8,128] {
  %param_0.1 = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %negate.2 = f32[8,128]{1,0:T(8,128)} negate(%param_0.1)
}

ENTRY %main.2 (args_0_.1: f32[8,128]) -> f32[8,128] {
  %args_0_.1 = f32[8,128]{1,0:T(8,128)} parameter(0)
  %fusion = f32[8,128]{1,0:T(8,128)} fusion(%args_0_.1), kind=kLoop, calls=%fused_computation, \
metadata={op_name="jit(loss)/neg" stack_frame_id=1}
  ROOT %fusion.1 = f32[8,128]{1,0:T(8,128)} fusion(%fusion), kind=kLoop, calls=%fused_computation.1, \
metadata={op_name="jit(loss)/jvp()/softmax(f32[8,128])/neg" stack_frame_id=2}
}
"""
FUSION = program(dma(1000), *wait(1000))
TOP_LEVEL = program(
    "%s8_s5 = sld [smem:[#allocation2]]  ;;  %s1_s4 = smov 0",
    "%p9_p9 = scmp.ne.s32.totalorder %s8_s5, 1",
    "%8 = sbr.rel (%p9_p9) target bundleno = 12 (0xc)",
    "%s2_s4 = sphi %s1_s4, %s3_s4  ;;  %s3_s4 = sadd.s32 1, %s2_s4",
    "%p1_p0 = scmp.lt.s32.totalorder %s3_s4, 3  ;;  %4 = inlined_call %s7_s0 /* %fusion = fusion(%args_0_.1) */",
    "%9 = sbr.rel (%p1_p0) target bundleno = 3 (0x3)",
    *[""] * 4,
    "%5 = inlined_call %s7_s0 /* %fusion.1 = fusion(%fusion) */",
    "%6 = inlined_call /* <late-finalization> */",
    "",
)


def written(folder, top_level=TOP_LEVEL, **kernels):
    """Writes dumps of the program to a folder; of its kernels, by default of the fusion alone."""
    (folder / "17-TLP-hlo.txt").write_text(HLO)
    (folder / "17-TLP-01-packed-bundles-post-ra.txt").write_text(top_level)
    (folder / "17-TLP-00-schedule-analysis_packed-bundles-post-ra.txt").write_text("Schedule analysis:")
    for name, text in (kernels or {"fusion": FUSION}).items():
        (folder / f"18-{name}-01-packed-bundles-post-ra.txt").write_text(text)
    return folder
