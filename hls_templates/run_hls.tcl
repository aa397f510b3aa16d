# Vitis HLS 2022.2 to 2023.1, which reads no HLS configuration: the same kernels and options from the same .cfg file.
#   KERNEL=fastcar_step STEP=csynth vitis_hls -f run_hls.tcl      STEP: csim, csynth (writes the .xo) or cosim
# Commands and options: UG1399, "Vitis HLS Command Reference".
proc read_config {path} {
    set values [dict create]
    set file [open $path]
    foreach line [split [read $file] "\n"] {
        if {[regexp {^([a-z._]+)=(.*)$} $line -> key value]} {
            dict set values $key $value
        }
    }
    close $file
    return $values
}

proc required {name} {
    if {![info exists ::env($name)]} {
        error "set $name: KERNEL=fastcar_step STEP=csynth vitis_hls -f run_hls.tcl"
    }
    return $::env($name)
}

set kernel [required KERNEL]
set step [required STEP]
if {$step ni {csim csynth cosim}} {
    error "STEP is csim, csynth or cosim, not $step"
}
set build [expr {[info exists ::env(BUILD)] ? $::env(BUILD) : "build"}]
set config [read_config ${kernel}_hls_config.cfg]
# Projects are named and not placed: the tool takes the folder that it is in.
set sources [pwd]
file mkdir $build/$kernel
cd $build/$kernel

open_project hls
set_top [dict get $config syn.top]
add_files [file join $sources [dict get $config syn.file]] -cflags "-I$sources -std=c++14"
if {[dict exists $config tb.file]} {
    add_files -tb [file join $sources [dict get $config tb.file]] -cflags "-I$sources -std=c++14"
}
open_solution -flow_target [dict get $config flow_target] solution
set_part [dict get $config part]
create_clock -period [dict get $config clock]
if {[dict exists $config clock_uncertainty]} {
    set_clock_uncertainty [dict get $config clock_uncertainty]
}
switch $step {
    csim { csim_design }
    csynth {
        csynth_design
        export_design -format xo -output [file join [pwd] $kernel.xo]
    }
    cosim {
        csynth_design
        cosim_design
    }
}
exit
