# Stands in for Vivado, XSCT and Vitis HLS: records every call as one line, and refuses a command, an option, a property or an
# IP that is not listed. The lists are of AMD's public documentation: UG835 (Vivado), UG1400 (XSCT), UG1399 (Vitis HLS), UG1393
# (properties of platforms and of kernels in RTL), PG201 (processing system), PG065 (clocks), PG099 (interrupts).
set documented_options {
    create_project {-force -part} get_board_parts {-quiet -latest_file_version} create_bd_design {} create_bd_cell {-type -vlnv}
    apply_bd_automation {-rule -config} get_bd_cells {} get_bd_pins {} get_bd_intf_pins {} connect_bd_net {} current_project {}
    current_fileset {} get_files {} assign_bd_address {} validate_bd_design {} save_bd_design {} make_wrapper {-top -import -files}
    generate_target {} write_hw_platform {-hw -hw_emu -force -file} validate_hw_platform {}
    {platform create} {-name -hw -hw_emu -proc -os -no-boot-bsp -out} {domain config} {-boot -bif -image} {platform write} {} {platform generate} {}
    createdts {-hw -zocl -platform-name -git-branch -overlay -compile -out}
    ipx::package_project {-root_dir -vendor -library -taxonomy -import_files} ipx::current_core {} ipx::get_memory_maps {-of_objects}
    ipx::associate_bus_interfaces {-busif -clock -reset} ipx::get_address_blocks {-of_objects} ipx::add_register {}
    ipx::add_register_parameter {} ipx::update_checksums {} ipx::save_core {}
    package_xo {-force -xo_path -kernel_name -ip_directory -ctrl_protocol}
    open_project {-reset} set_top {} add_files {-tb -cflags} open_solution {-reset -flow_target} set_part {} create_clock {-period -name}
    set_clock_uncertainty {} csim_design {-argv} csynth_design {} cosim_design {-rtl} export_design {-format -output -rtl}
}
set documented_properties {
    board_part board_connections platform.extensible SELECTED_SIM_MODEL PFM_NAME PFM.AXI_PORT PFM.CLOCK PFM.IRQ top
    platform.default_output_type platform.design_intent.embedded platform.design_intent.server_managed
    platform.design_intent.external_host platform.design_intent.datacenter
    CONFIG.PSU__USE__M_AXI_GP0 CONFIG.PSU__USE__M_AXI_GP1 CONFIG.PSU__USE__M_AXI_GP2 CONFIG.PSU__USE__IRQ0 CONFIG.PSU__FPGA_PL0_ENABLE
    CONFIG.PSU__CRL_APB__PL0_REF_CTRL__FREQMHZ CONFIG.PSU__HIGH_ADDRESS__ENABLE
    sdx_kernel sdx_kernel_type vitis_drc ipi_drc address_offset size value
    CONFIG.PRIM_SOURCE CONFIG.RESET_TYPE CONFIG.RESET_PORT CONFIG.CLKOUT1_REQUESTED_OUT_FREQ CONFIG.C_IRQ_CONNECTION
}
set documented_answers {ipx::current_core core ipx::get_memory_maps map ipx::get_address_blocks block ipx::add_register register
    ipx::add_register_parameter parameter get_bd_cells cell get_bd_pins pin get_bd_intf_pins pin get_files file current_project project current_fileset fileset}

proc checked {command arguments} {
    foreach argument $arguments {
        if {[regexp {^-[a-z_-]+$} $argument] && $argument ni [dict get $::documented_options $command]} {
            error "$command has no option $argument"
        }
    }
    puts [list {*}$command {*}$arguments]
}

proc unknown {args} {
    set command [expr {[lindex $args 0] in {platform domain} ? [lrange $args 0 1] : [lindex $args 0]}]
    if {![dict exists $::documented_options $command]} {
        error "there is no command $command"
    }
    set arguments [lrange $args [llength $command] end]
    if {[dict exists $::documented_answers $command]} {
        return [dict get $::documented_answers $command]:[lindex $arguments 0]
    }
    checked $command $arguments
    if {$command eq "get_board_parts"} {
        return $::env(BOARDS)
    }
}

proc set_property {args} {
    set pairs [expr {[lindex $args 0] eq "-dict" ? [lindex $args 1] : [lrange $args 0 1]}]
    foreach {property value} $pairs {
        if {$property ni $::documented_properties} {
            error "there is no property $property"
        }
        puts [list set_property $property $value [lindex $args 2]]
    }
}

proc version {args} { return $::env(VERSION) }

if {[catch {source $::env(SCRIPT)} message]} {
    puts stderr "ERROR: $message"
    exit 1
}
