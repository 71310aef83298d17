TP=8; show $TP "$TP" '$TP' \$TP ${TP}x x"${TP}"y
export A=1 B="two words"; show $A $B "$B" --flag=$B "--flag=$B"
show ${X:-64} "${X:-a b}" ${X-5} ${Y:=7} $Y ${A:+set} ${A+set}
A=3 B=4; show $((A * B)) $(( (A+B)*2 - 7/2 )) $((B % A)) $((-A + 10))
LIST=(--a 1 "--b x" ); LIST+=(--c $((1+1))); show ${LIST[@]}
show "${LIST[@]}" ${#LIST[@]} ${LIST[1]} $LIST
S="a"; S+="b c"; show $S "$S"
N=S; show ${!N} x"${!N}"
if [ "$Q" = "" ]; then V=1; else V=2; fi; show $V
N=5; if [[ $N -gt 3 && $N != 7 ]]; then show more; elif [ $N -eq 5 ]; then show five; fi
M=7B; if [ $M == "1B" ]; then H=1; elif [ $M == "7B" ]; then H=2; else H=3; fi; show $H
case "$M" in 1B|2B) K=a ;; 7*) K=b ;; *) K=c ;; esac; show $K
case x in a) show no ;; esac; show yes
[ -z "$Q" ] && show empty || show full
[ -n "$Q" ] && show full || show empty
! [ -n "$Q" ] && show empty
show a \
  b # a comment's end
show "a  b" a  b '  ' ""
read -r -d '' T <<EOF
  --x $N --y "q"
EOF
show $T
T=$(cat <<'EOF'
 --z $N
EOF
); show $T
show "it's" 'say "no"' "say \"yes\"" g'h'"i"
P="  lead and trail "; show x${P}y $P
E=""; show a $E b "$E" c
W="Upper"; show ${#W}
f() { G=1; }
f; show ${G:-0}
show $(expr 3 + 4) $(echo hello world)
bash -c "show_inner=1; true"; show after
unset N; show ${N:-gone}
(( 3 > 2 )) && show counted
while [[ 1 -gt 2 ]]; do show never; done; show done
D=(); D+=(x y); for i in 1; do D+=(z$i); done; show ${D[*]}
A=(1 2 3); I=1; show ${A[-1]} ${A[$I]} ${A[I+1]} x${A[9]}y
NONE=(); show a "${NONE[@]}" ${NONE[@]} b ${#NONE[@]} ${#W}
